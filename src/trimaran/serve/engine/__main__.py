"""`python -m trimaran.serve.engine`: one rank of an engine. Started by the server; not for people."""

import argparse
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

if __name__ == "__main__":
    gc.disable()  # imports leave little garbage, and looking for it takes a seventh of their time

from trimaran.core import EXIT_USER, UserError, file_error
from trimaran.runs import die_with_parent, set_process_name
from trimaran.serve.engine.engine_loop import EngineLoop, EngineSocket
from trimaran.serve.engine.open_engine import open_engine
from trimaran.serve.settings import EngineConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve requests until the server says stop or goes away. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trimaran.serve.engine", description=__doc__)
    parser.add_argument("config", help="an EngineConfig as JSON")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--address", default="", help="HOST:PORT at which the ranks meet")
    parser.add_argument("--fd", type=int, default=-1, help="the socket to the server, for rank 0")
    options = parser.parse_args(arguments)
    gc.enable()
    die_with_parent(signal.SIGKILL)
    set_process_name(f"engine-{options.rank}")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    config = EngineConfig.parse(options.config)
    if options.rank:
        from trimaran.serve.engine.serving_rank import place_and_model, serve_rank  # noqa: PLC0415 - other ranks only

        try:
            return serve_rank(*place_and_model(config, options.rank, options.address))
        except UserError:
            return EXIT_USER  # rank 0 makes the same mistake, and tells the server
    link = EngineSocket(socket.socket(fileno=options.fd))
    try:
        if config.num_ranks > 1:
            from trimaran.serve.engine.serving_rank import open_ranked_engine  # noqa: PLC0415 - several ranks only

            opened = open_ranked_engine(config, options.address)
        else:
            opened = open_engine(config)
    except (UserError, OSError) as error:
        mistake = error if isinstance(error, UserError) else file_error(error)
        if mistake is None:
            raise
        link.send({"failed": mistake.as_dict()})
        return EXIT_USER
    if config.num_ranks == 1:  # ranks free their network when they load another one
        gc.collect()
        gc.freeze()  # a collection among the 400,000 objects of the libraries would be a pause for every request
    EngineLoop(opened.engine, link, opened.load).run()
    opened.close()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of CUDA and of process groups need not be waited for
