"""The Lua scripts of the record. Each says at its top what it does, and what a crash around it costs."""

from penstock.redis.scripts import load_script

CLAIM = load_script("penstock.record", "claim")
TAKE = load_script("penstock.record", "take")
REAP = load_script("penstock.record", "reap")
ADOPT = load_script("penstock.record", "adopt")
DISOWN = load_script("penstock.record", "disown")
APPEND = load_script("penstock.record", "append")
FINISH = load_script("penstock.record", "finish")
HANDED = load_script("penstock.record", "handed")
RELEASE = load_script("penstock.record", "release")
RENEW = load_script("penstock.record", "renew")
CANCEL = load_script("penstock.record", "cancel")
