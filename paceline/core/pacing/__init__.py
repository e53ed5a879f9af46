"""Everything that exists for latency targets, tenants and forecasts, behind ``step.limits``; and
the door, which asks the forecast."""
