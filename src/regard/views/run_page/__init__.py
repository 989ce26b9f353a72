"""The page of a training run: its curves, live while it trains, and as one offline file."""
