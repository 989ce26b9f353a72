"""The page of the heads of a training run: heat maps over steps and events, as one offline file."""
