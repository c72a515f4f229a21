"""What a server of OpenAI's API is asked and answers. It needs orjson only, so that a server can have it."""
