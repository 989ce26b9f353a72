"""The terms that fill the four slots of attention: score, mask, bias and normalizer."""
