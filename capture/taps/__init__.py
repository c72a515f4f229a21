"""Sources of calls inside a process: the dispatcher (native), and a dispatch mode where there is no compiler."""
