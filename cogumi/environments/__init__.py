"""What a policy acts in: tools and turns.

An environment is a class in one file. `reset(**record)` gets a row of the data and may return text, which is added to the
prompt. `get_reward()` returns what the episode earned. It is of one of two kinds:

- *Tools*: every other public method is a tool, called by TRL 1.15's own loop. The model sees types and docstring.
- *Turns*: `respond(text)` gets what the model wrote and returns the next message to it, or None at the episode's end.

`rows`, a list of dicts or a class method that returns one, is the data where the config names none.
"""
