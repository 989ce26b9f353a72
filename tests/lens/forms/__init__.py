"""The forms of attention and what capture does with each: the list behind the tables in README.md and docs."""
