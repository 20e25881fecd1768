"""An HTTP server in the form of OpenAI's API: requests, one continuous batch for all of them, responses."""
