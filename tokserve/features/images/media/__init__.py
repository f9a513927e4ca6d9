"""Images of requests: bytes from data:, http and file URLs, and a process that decodes them.

The process of the server opens no image: bytes that a client chose go to a worker that may crash, and is limited.
"""
