"""CaptureWarning: the category of every warning of the lens, so that users can filter them."""

from __future__ import annotations


class CaptureWarning(UserWarning):
    """A tape lacks something, or shows it in another form than the model used.

    >>> import warnings
    >>> warnings.filterwarnings("ignore", category=CaptureWarning)
    """
