# Sort the overview by role; find the heads that look at the token before, and those that rest on the first one.
from regard.tasks.look import tape_of
from regard.tasks.model_folder import SAMPLE

tape = tape_of(SAMPLE, text="Good night, my lord. Good night, good night.")
tape
