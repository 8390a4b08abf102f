"""Dialects: wire APIs of the gateway as pure translations between JSON and `messages`. One file a dialect."""
