"""Doubles of the servers in the process's own memory: bus and record keep their contracts without Kafka and Redis.

The tests of these contracts run on the doubles too (`tests/bus`, `tests/record`). What only a server can show is not
there: nothing outlives the process. `TestPipeline` (`penstock.testing.pipeline`) has real clients and workers on them.
"""
