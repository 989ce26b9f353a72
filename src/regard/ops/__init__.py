"""The operator: one equation, four slots."""
