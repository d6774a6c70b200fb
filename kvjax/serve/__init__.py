"""An HTTP server with OpenAI's interface on top of a running batch. Needs the extra `serve`.

One thread drives the batch (`worker`). All else runs in asyncio: `guard` checks requests before they are parsed, `schema`
says what they may hold, `preparing` makes jobs of them, `serving` passes these to the thread, and `replies` puts the
tokens into OpenAI's format.
"""
