"""What the service and the plugin need of the kubelet: its directories, its list of pods, and the node's PID namespace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from scrubber.doctor.finding import AS_ROOT, Check, Level, Node, unseen
from scrubber.doctor.looking import listens, matching, present

__all__ = ["kubelet", "pid_namespace", "plugins", "pod_resources", "pod_resources_socket"]

_START = "systemctl status kubelet; or give its directory (its --root-dir) with --kubelet-dir."
_OURS = "scrubber-"
_RIVALS = ("nvidia-", "nvidia.")
"""How the sockets of NVIDIA's own plugin begin."""


def pod_resources_socket(node: Node) -> Path:
    """Where the kubelet says who has which device."""
    said = node.service.places.pod_resources
    return node.path(said) if said is not None else node.path(node.kubelet_dir) / "pod-resources" / "kubelet.sock"


def _serious(node: Node) -> Level:
    """What breaks a promise where there are real GPUs; who serves simulated ones, or nothing, breaks none."""
    return Level.ERROR if node.service.has_hardware else Level.WARNING


def kubelet(node: Node) -> Iterator[Check]:
    """The kubelet's directories that the service and the plugin use are there, and it listens in them."""
    directory = node.path(node.kubelet_dir)
    try:
        there = present(directory)
    except OSError as error:
        yield unseen("kubelet", "whether a kubelet is here was not seen", error)
        return
    if not there:
        sentence = f"There is no kubelet here: {directory} does not exist."
        yield Check("kubelet", Level.WARNING, sentence, "Start it, or give its directory with --kubelet-dir.")
        return
    # Where the plugin registers, and who has which device. The kubelet makes all of these itself.
    registration = directory / "device-plugins" / "kubelet.sock"
    wanted = {
        "device-plugins/kubelet.sock": registration,
        "pod-resources/kubelet.sock": pod_resources_socket(node),
    }
    missing = []
    try:
        if not present(registration.parent):
            # Otherwise the plugin does not register in it, and the service's pod does not mount it.
            wanted["plugins_registry"] = directory / "plugins_registry"
        for name, path in wanted.items():
            if not present(path):
                missing.append(name)
        if missing:
            sentence = f"{directory} has no {', no '.join(missing)}."
            yield Check("kubelet", Level.WARNING, sentence, f"Start the kubelet: {_START}")
            return
        dead = [path for path in (registration, wanted["pod-resources/kubelet.sock"]) if not _answers(path)]
    except OSError as error:
        yield unseen("kubelet", "whether the kubelet's sockets are there was not seen", error)
        return
    if dead:
        sentence = f"No kubelet listens on {' or '.join(map(str, dead))}."
        yield Check("kubelet", Level.WARNING, sentence, f"Start the kubelet: {_START}")
        return
    yield Check("kubelet", Level.OK, f"The kubelet listens in {directory}.")


def _answers(path: Path) -> bool:
    try:
        return listens(path)
    except PermissionError as error:
        raise PermissionError(error.errno, error.strerror, str(path)) from error


def plugins(node: Node) -> Iterator[Check]:
    """Our plugin has its socket where the kubelet looks for it, and no other one hands out the same GPUs."""
    directory = node.path(node.kubelet_dir)
    found: list[Path] = []
    try:
        if not present(directory):
            return  # as whoever looks at the directories says
        for name in ("device-plugins", "plugins_registry"):
            found += matching(directory / name, "*.sock")
        rivals = [each for each in found if each.name.startswith(_RIVALS) and _answers(each)]
        ours = [each for each in found if each.name.startswith(_OURS) and _answers(each)]
    except OSError as error:
        yield unseen("plugins", "which plugins serve the kubelet was not seen", error)
        return
    if rivals and not node.service.simulated:
        sentence = f"Another plugin may hand out the same GPUs, past this service: {rivals[0]}."
        remedy = (
            "kubectl delete its DaemonSet (nvidia-device-plugin, or the GPU Operator's devicePlugin.enabled: false), as "
            "docs/replacing-nvidias-plugin.md says; or put it behind ours: docs/behind-a-vendors-plugin.md."
        )
        yield Check("plugins", _serious(node), sentence, remedy)
    if ours:
        yield Check("plugins", Level.OK, f"The device plugin listens on {ours[0]}.")
    else:
        # A warning before the plugin is installed. An error once containers have devices: a kubelet that starts while no
        # plugin is registered does not call PreStartContainer for them.
        many = node.kubelet.has_devices
        has = f", and {many} container{'s have' if many > 1 else ' has'} devices of ours" if many else ""
        sentence = (
            f"No device plugin of ours listens in {directory}{has}: the kubelet has no GPU to give to a pod, and pods that run "
            "keep theirs. If the kubelet is restarted, it starts their containers without asking the service. On a node that "
            "is in use this is critical (alert ScrubberPluginAway)."
        )
        remedy = "systemctl enable --now scrubber-plugin.service; as a pod: kubectl apply -k deploy/kubernetes/base"
        yield Check("plugins", _serious(node) if many else Level.WARNING, sentence, remedy)


def pod_resources(node: Node) -> Iterator[Check]:
    """The kubelet answers who has which device, as root and from no pod, and its other witnesses agree."""
    said, socket = node.kubelet, pod_resources_socket(node)
    heard = node.service.kubelet if node.service.answered else ""
    trusted = said.believed or (said.young and heard == "ok")
    if said.young and not trusted:
        remedy = f"Call scrubber doctor again in a minute; if it says the same then: {_START}"
        yield Check("pod-resources", Level.WARNING, heard or said.sentence, remedy)
        return
    level = _serious(node)
    if heard and heard != "ok":
        remedy = f"Until then every start waits for a certificate. {_START}"
        yield Check("pod-resources", level, f"The service does not believe the kubelet: {heard}", remedy)
    if not said.asked:
        return  # there is no socket, as the kubelet's check says
    if said.forbidden:
        sentence = f"You may not ask {socket}; whether the kubelet answers was not seen."
        yield Check("pod-resources", Level.WARNING, sentence, AS_ROOT)
        return
    if not trusted:
        remedy = f"Until its list is believed every start waits for a certificate, and no pod counts as gone. {_START}"
        yield Check("pod-resources", level, said.sentence or f"{socket} gave no list.", remedy)
        return
    if said.remarks:
        remedy = (
            "Give the kubelet's directory with --kubelet-dir and where it keeps its pods' logs with --pod-logs-dir, to this "
            f"command and to scrubber serve. {AS_ROOT}"
        )
        yield Check("pod-resources", Level.WARNING, " ".join(said.remarks), remedy)
        return
    has = f"{said.has_devices} container{'s have' if said.has_devices != 1 else ' has'} devices of ours"
    yield Check("pod-resources", Level.OK, f"The kubelet answers, and is believed; by its list {has}.")


def pid_namespace(node: Node) -> Iterator[Check]:
    """The node's processes are seen from here. The service refuses to start where they are not, unless it simulates."""
    if node.service.simulated:
        yield Check("pid-namespace", Level.OK, "The simulated node needs no PID namespace of the machine's.")
        return
    # Imported here: every other command would wait for what the kubelet's adapter loads.
    from scrubber.adapters.kubelet.pid_namespace import doubt_about, look_around

    doubt = doubt_about(look_around(pod_resources_socket(node), node.path("/proc")))
    if doubt is None:
        yield Check("pid-namespace", Level.OK, "The node's processes are seen from here.")
        return
    level = _serious(node)
    yield Check("pid-namespace", level, f"Where this command runs: {doubt.sentence}", doubt.remedy)
