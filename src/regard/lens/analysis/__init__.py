"""Analysis: head measures, attention flow, word alignment and ablation."""
