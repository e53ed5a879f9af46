"""All code for latency targets, tenants and forecasts, behind the interface ``step.limits``; and
``RequestAdmission``, which refuses requests by these forecasts."""
