# Blocks of a trained decoder, and under each word how probable the model found it: choose the view "text".
from regard.tasks.look import tape_of
from regard.tasks.model_folder import SAMPLE

tape = tape_of(SAMPLE, text="What is the king? The king is my lord, and my lord is come.")
tape
