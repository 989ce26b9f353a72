"""Results on real data: a recipe a task, and a runner that trains, measures and keeps a table.

python -m results list
python -m results run deen-transformer --data ../data --jobs 4
python -m results table
"""
