"""The gRPC API of the service: messages, servers and clients on its sockets."""
