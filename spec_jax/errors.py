"""The one exception for bad input. Command lines turn it into one line and exit status 2."""


class UserError(Exception):
  """Something the user gave is wrong; the message is one line naming the field and its value."""
