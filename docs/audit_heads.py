"""Print the audit heads (SEQ:HASH) in a response of Prometheus, each once, oldest first; audit.md explains their use.

    curl ... /api/v1/query_range ... | python audit_heads.py        (needs the standard library only)

Exits with 1 if there is none, or if the answer is about several nodes.
"""

import json
import sys

moments, nodes = {}, set()
for series in json.load(sys.stdin)["data"]["result"]:
    labels = series["metric"]
    nodes.add(labels.get("instance"))
    name = labels.get("part", "sequence")  # the parts 0 to 7 of the hash, and the number of its row
    for moment, value in series.get("values") or [series["value"]]:
        moments.setdefault(moment, {})[name] = int(float(value))
if len(nodes) > 1:
    sys.exit(f"The answer is about several nodes: {', '.join(sorted(map(str, nodes)))}. Select one by its instance.")
complete = [found for found in moments.values() if len(found) == 9 and found["sequence"]]
# Two hashes of one row are two heads: they show that the audit log was rewritten.
heads = {(found["sequence"], "".join(f"{found[str(part)]:08x}" for part in range(8))) for found in complete}
if not heads:
    sys.exit("There is no head in this answer: nine numbers of the same moment are needed.")
sys.stdout.writelines(f"{sequence}:{digest}\n" for sequence, digest in sorted(heads))
