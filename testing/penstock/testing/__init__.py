"""Doubles of the servers in the process's own memory: bus and record keep their contracts without Kafka and Redis.

The tests of these contracts run on the doubles too (`tests/bus`, `tests/record`). The doubles keep nothing beyond their
process. `TestPipeline` (`penstock.testing.pipeline`) runs real clients and workers on them.
"""
