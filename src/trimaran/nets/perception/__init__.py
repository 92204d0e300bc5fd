"""The reference perception model: cameras, LiDAR and radar in, boxes and a bird's-eye-view segmentation out."""

from trimaran.nets.perception.model import Perception
from trimaran.nets.perception.perception_network import PerceptionNetwork, load_perception_weights, perception_network

__all__ = ["Perception", "PerceptionNetwork", "load_perception_weights", "perception_network"]
