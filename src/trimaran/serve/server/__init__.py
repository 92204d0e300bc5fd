"""The OpenAI-compatible server: HTTP, texts and the queue. The network runs in the processes of `serve.engine`."""
