"""Communication between processes: frames, actor calls, long polls."""
