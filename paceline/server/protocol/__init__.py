"""Bodies of requests and of answers: their fields, checks and meaning.

Below the service and the endpoints: nothing here runs a request.
"""
