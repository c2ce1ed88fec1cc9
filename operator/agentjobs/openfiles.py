"""How many files a process may open; sockets are files."""

import resource


def allow_files(wanted: int) -> int:
    """Let this process open so many files, if it may; return how many of them it may open.

    1024 is the usual limit for the sake of select(), which is not used here.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
