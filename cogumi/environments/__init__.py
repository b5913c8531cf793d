"""Environments in which a policy acts, with tools or in turns.

An environment is a class in one file. `reset(**record)` gets a row of the data and may return text, which is added to the
prompt. `get_reward()` returns the episode's reward. There are two kinds:

- *Tools*: every other public method is a tool, called by TRL 1.15's own loop. The model sees types and docstring.
- *Turns*: `respond(text)` gets the model's text and returns the next message, or None at the episode's end.

`rows`, a list of dicts or a class method that returns one, is the data if the config names none.
"""
