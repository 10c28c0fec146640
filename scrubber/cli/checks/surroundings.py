"""What the service stands on: itself, the kubelet, and a PID namespace from which the node's processes are seen."""

from __future__ import annotations

from collections.abc import Iterator

from scrubber.cli.checks.finding import Check, Level, Node

__all__ = ["kubelet", "pid_namespace", "service"]


def service(node: Node) -> Iterator[Check]:
    """The service answers, keeps its record, and refuses what it must."""
    said = node.service
    if said.refusal:
        yield Check("service", Level.ERROR, said.refusal)  # it says what to do
        return
    if said.ledger != "ok":
        yield Check("service", Level.ERROR, f"The service hands nothing over: {said.ledger}")
        return
    sentence = f"Version {said.version} serves the {said.backend} backend under the policy {said.policy}."
    if said.enforcement != "enforce":
        remedy = "Set enforcement: enforce in the policy once its verdicts are what you expect."
        yield Check("service", Level.WARNING, f"{sentence} It only observes: no start is refused.", remedy)
        return
    yield Check("service", Level.OK, sentence)


def kubelet(node: Node) -> Iterator[Check]:
    """The kubelet's directories that the service and the plugin read are there."""
    directory = node.path(node.kubelet_dir)
    if not directory.is_dir():
        sentence = f"There is no kubelet here: {directory} does not exist."
        yield Check("kubelet", Level.WARNING, sentence, "Give its directory with --kubelet-dir, or start it.")
        return
    # Where the plugin registers, and who has which device. The kubelet makes all of these itself.
    missing = [
        name
        for name in ("device-plugins", "plugins_registry", "pod-resources/kubelet.sock")
        if not (directory / name).exists()
    ]
    if missing:
        sentence = f"{directory} has no {', no '.join(missing)}."
        remedy = "Start the kubelet, or give its directory (its --root-dir) with --kubelet-dir."
        yield Check("kubelet", Level.WARNING, sentence, remedy)
        return
    yield Check("kubelet", Level.OK, f"The kubelet's directories are in {directory}.")


def pid_namespace(node: Node) -> Iterator[Check]:
    """The node's processes are seen from here. The service refuses to start where they are not, unless it simulates."""
    if node.service.backend == "sim":
        yield Check("pid-namespace", Level.OK, "The simulated node needs no PID namespace of the machine's.")
        return
    # Imported here: every other command would wait for gRPC, which the kubelet's adapter loads.
    from scrubber.adapters.kubelet.pid_namespace import doubt_about, look_around

    socket = node.path(node.kubelet_dir) / "pod-resources" / "kubelet.sock"
    doubt = doubt_about(look_around(socket, node.path("/proc")))
    if doubt is None:
        yield Check("pid-namespace", Level.OK, "The node's processes are seen from here.")
        return
    level = Level.ERROR if node.service.backend == "nvidia" else Level.WARNING
    yield Check("pid-namespace", level, f"Where this command runs: {doubt.sentence}", doubt.remedy)
