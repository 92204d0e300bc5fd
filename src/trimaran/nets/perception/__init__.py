"""The reference perception model: cameras and LiDAR in, boxes and ground from above out."""

from trimaran.nets.perception.model import Perception
from trimaran.nets.perception.perception_network import PerceptionNetwork, load_perception_weights, perception_network

__all__ = ["Perception", "PerceptionNetwork", "load_perception_weights", "perception_network"]
