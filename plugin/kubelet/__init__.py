"""The kubelet's side of the plugin: registration, the device-plugin calls, and the advertised devices."""
