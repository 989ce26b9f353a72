# The 16 heads of a small language model that is part of the library, over one sentence.
from regard.tasks.look import tape_of
from regard.tasks.model_folder import SAMPLE

tape = tape_of(SAMPLE, text="My lord, the king is come, and my lord is tired.")
tape
