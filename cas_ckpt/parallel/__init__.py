"""parallel: threads, a process of our own, and other ranks; what they have in common is that no error is lost.

    workers.py        a list of work shared among threads; one thread that does a piece of work again whenever it
                      is woken; which cores they keep off
    child_process.py  a process that works for this one: started, spoken with, ended
    peers.py          how a rank sees the others, and how an error of one ends the work of all

Invariant: whatever is raised in a thread, a process or a rank is raised by whoever waits for it. Knows nothing of
what the work is.
"""
