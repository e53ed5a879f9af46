"""The engines behind the gateway: what each is, can do and says, and how it stands."""
