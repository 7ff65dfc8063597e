#!/usr/bin/env bash
# slow.sh CMD…: run CMD with all that it starts on half a core. The quota is a
# cgroup's, of version 2 or 1. Where no cgroup can be made, CMD runs beside four busy loops for each core, which
# end with this script.
set -u
[ $# -gt 0 ] || { echo "usage: tools/slow.sh CMD…" >&2; exit 2; }
period=100000
quota=$((period / 2))

make_group() { # make_group DIRECTORY FILE VALUE: a group below DIRECTORY with the quota, which this script enters
    group=$1/penstock-slow-$$
    mkdir "$group" 2>/dev/null || return 1
    if echo "$3" 2>/dev/null >"$group/$2" && echo $$ 2>/dev/null >"$group/cgroup.procs"; then return 0; fi
    rmdir "$group"
    return 1
}

leave_group() { # what CMD left running goes back to where this script was, so that the group can be removed
    for pid in $(cat "$group/cgroup.procs"); do echo "$pid" 2>/dev/null >"$before/cgroup.procs"; done
    rmdir "$group" 2>/dev/null
}

limit() {
    local mount own
    mount=$(awk '$3 == "cgroup2" {print $2; exit}' /proc/mounts 2>/dev/null)
    if [ -n "$mount" ]; then
        own=$(sed -n 's/^0:://p' /proc/self/cgroup)
        # A group whose processes are not in leaves gives no controllers to its children: the root alone may.
        for before in "$mount${own%/}" "$mount"; do
            echo +cpu 2>/dev/null >"$before/cgroup.subtree_control"
            make_group "$before" cpu.max "$quota $period" && { before=$mount${own%/}; return 0; }
        done
    fi
    mount=$(awk '$3 == "cgroup" && $4 ~ /(^|,)cpu(,|$)/ {print $2; exit}' /proc/mounts 2>/dev/null)
    [ -n "$mount" ] || return 1
    own=$(sed -n 's/^[0-9]*:\(.*,\)\?cpu\(,[^:]*\)\?://p' /proc/self/cgroup)
    for before in "$mount${own%/}" "$mount"; do
        make_group "$before" cpu.cfs_quota_us "$quota" && return 0
    done
    return 1
}

loops=()
end() {
    if [ ${#loops[@]} -gt 0 ]; then kill "${loops[@]}" 2>/dev/null; else leave_group; fi
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP
if limit; then
    echo "slow.sh: half a core, by $group" >&2
else
    # A loop looks whether this script lives: it ends, too, when the script is killed.
    for ((number = 4 * $(nproc); number > 0; number--)); do
        bash -c 'while [ -d /proc/'$$' ]; do for ((i = 0; i < 100000; i++)); do :; done; done' &
        loops+=($!)
    done
    echo "slow.sh: no cgroup can be made here: beside ${#loops[@]} busy loops" >&2
fi
"$@" &
child=$!
trap 'kill -INT $child 2>/dev/null; wait $child; exit 130' INT
trap 'kill -TERM $child 2>/dev/null; wait $child; exit 143' TERM HUP
wait $child
