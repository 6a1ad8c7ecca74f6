"""A process with only the weights service for a server's address: prints the port it listens on."""

import asyncio
import sys

import grpc

from jurybox.server.gateway.remote_weights import RemoteWeights


async def main(address: str, most_bytes: int, stall: float, most_streams: int, port: int) -> None:
    server = grpc.aio.server()
    RemoteWeights(address, most_bytes=most_bytes, stall=stall, most_streams=most_streams).add_to(server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])))
