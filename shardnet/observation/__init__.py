"""A cluster seen from outside: `observer` asks, `replies` reads what it hears, `views` is what it finds; `follower` looks again and again,
`rates` and `chronicle` say what has changed since.
"""
