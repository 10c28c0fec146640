"""A process whose threads each create the next one and end: every list of them is outdated when it is read.

It is a compiled program, because it has to be faster than the process that inspects it.
"""

import shutil
import subprocess
from pathlib import Path

__all__ = ["WAYS", "compiled"]

WAYS = ("shared", "own", "own-beside-the-first", "mapped")
"""How the file is held open: in one shared descriptor table; in each thread's own table, without or with a living
first thread that does not have the file; or only in the memory map."""

_SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

enum { STACKS = 4096, SIZE = 4096 };
static char stacks[STACKS][SIZE] __attribute__((aligned(16)));
static int flags = CLONE_VM | CLONE_FS | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM;

static int run(void *number) {
    long next = ((long)number + 1) % STACKS;
    while (clone(run, stacks[next] + SIZE - 64, flags, (void *)next) < 0)
        ;
    syscall(SYS_exit, 0);
    return 0;
}

static int hold(void *path) {
    int file = open(path, O_RDWR);
    if (file < 0)
        _exit(1);
    return run(0);
}

int main(int count, char **words) { /* what it says when it is ready, a way, a file; or "listens", a socket's path */
    static char stack[SIZE * 4] __attribute__((aligned(16)));
    const char *way = words[2], *path = words[3];
    alarm(120);
    if (!strcmp(way, "listens")) {
        struct sockaddr_un address = {.sun_family = AF_UNIX};
        strcpy(address.sun_path, path);
        int server = socket(AF_UNIX, SOCK_STREAM, 0);
        if (bind(server, (void *)&address, sizeof address) || listen(server, 64))
            return 1;
    }
    if (!strcmp(way, "mapped")) {
        int file = open(path, O_RDWR);
        if (mmap(0, 4096, PROT_READ, MAP_SHARED, file, 0) == MAP_FAILED)
            return 1;
        close(file);
    }
    if (!strcmp(way, "shared") && open(path, O_RDWR) < 0)
        return 1;
    int own = !strncmp(way, "own", 3);
    flags |= own ? 0 : CLONE_FILES;
    clone(own ? hold : run, stack + sizeof stack - 64, flags, own ? (void *)path : (void *)0);
    usleep(20000);
    if (write(1, words[1], strlen(words[1])) < 0 || write(1, "\n", 1) < 0)
        return 1;
    while (!strcmp(way, "own-beside-the-first"))
        pause();
    syscall(SYS_exit, 0);
    return count;
}
"""


def compiled(directory: Path) -> str:
    """Compile the program in ``directory`` and return its path. Usage: ``relay SAID_WHEN_READY WAY FILE``."""
    if shutil.which("gcc") is None:
        raise RuntimeError("A process whose threads come and go is compiled by the tests: install gcc.")
    source, program = directory / "relay.c", directory / "relay"
    source.write_text(_SOURCE)
    subprocess.run(["gcc", "-O1", "-w", "-o", str(program), str(source)], check=True, capture_output=True)
    return str(program)
