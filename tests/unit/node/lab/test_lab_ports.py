"""Ports of the laboratory's runs: one is prepared while another goes on."""

from dataclasses import replace

from node.config.schema import CoordinatorSection, RunConfig
from node.dashboard.pages import listen_address
from node.lab.laboratory import PORTS


def test_a_run_has_its_page_below_the_ports_of_the_next() -> None:
    config = replace(RunConfig(), coordinator=CoordinatorSection(listen="10.77.255.1:7700", one_port=False))
    page = listen_address(config)
    assert page is not None
    # The port for joining, the next for nodes, and the page's.
    assert 7700 + 1 < page[1] < 7700 + PORTS
