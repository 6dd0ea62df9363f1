"""A cluster seen from outside: `observer` asks, `views` is what it finds, `rates` and `chronicle` say what has changed since."""
