"""What callers send and what they are sent: every body's fields, checked, and their meaning.

Below the service and the endpoints: nothing here runs a request.
"""
