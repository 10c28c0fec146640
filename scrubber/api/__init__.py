"""The service on its sockets: messages, servers, client."""
