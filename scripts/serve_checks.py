def run_checks():
    raise NotImplementedError
