"""Where requests are: waiting, running, or waiting for another one's prompt."""
