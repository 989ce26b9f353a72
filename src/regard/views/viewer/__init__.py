"""The viewer: a local web server with a zoomable map of attention."""
