"""`make compose-test`: runs the cluster of compose.yaml for real, hurts it, and looks at what it does.

    console     messages while it runs, and the error that ends it
    engine      docker and docker-compose, or the Compose plugin
    image       the image that all containers run, from a base that can be had
    story       what the nodes say, and when
    cluster     one cluster: its containers, its story, and taking it all down
    traffic     which way the bytes of a training go
    scenarios   a training without faults, and one with all of them

It needs only the standard library, since it runs before there is any environment. It observes everything from outside: logs with the
engine's timestamps, `shardnet status` in a container, counters of network interfaces, exit statuses.
"""
