"""The networks of the paper in their forms for small images, and a small one for the demo."""

from driveprune.models.alexnet import alexnet
from driveprune.models.digits import digits_net
from driveprune.models.resnet import resnet18
from driveprune.models.vgg import vgg16

__all__ = ["alexnet", "digits_net", "resnet18", "vgg16"]
