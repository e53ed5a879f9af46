"""A fleet: replicas of ``paceline serve`` placed, watched, replaced and updated, behind gateways
that are told of them.

::

    driver         the loop: looks at hosts and gateways, asks the controller, does what it says
    process_host   replicas as processes of this host
    ray_host       replicas on the nodes of a Ray cluster
    replica        one replica's process and its file
    gateways       tells gateways their pool, and reads what they see
    spec           the file
    controller     what to do: a value, which the simulator drives too

Each imports what stands below it. No token passes through here: callers talk to gateways, and those
to replicas.
"""
