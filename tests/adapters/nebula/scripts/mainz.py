"""Load like MainzTrain: the recorded tag, else the newest persisted, else the newest in any tier.

argv: home, the tag that was noted. Prints the tag that was found, or "none".
"""

import sys

import holdfast.adapters.nebula as nm

home, noted = sys.argv[1:]
nm.init(persistent_storage_path=home, persistent_time_interval=3600)
found = nm.get_checkpoint(persist_path=home, tag=noted)
if found is None or found.tag == "":
    found = nm.get_latest_checkpoint(persist_path=home)
if found is None or found.tag == "":
    found = nm.get_latest_checkpoint()
print(found.tag or "none")
if found.tag:
    assert found.load("model")["step"] == int(found.tag.removeprefix("global_step"))
