// An empty NRI plugin in Go, on the runtime's own library: what nri-numa is compared with where
// BENCH_EMPTY names it. With the argument "naming" it names every container that it knows, where
// nri-numa would (bench/empty_plugin.py).
package main

import (
	"context"
	"os"
	"strings"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
)

const exclusiveQuota = 400_000

type plugin struct {
	naming           bool
	known, exclusive map[string]bool
}

func (p *plugin) named() (updates []*api.ContainerUpdate) {
	for id := range p.known {
		update := &api.ContainerUpdate{ContainerId: id, IgnoreFailure: true}
		update.SetLinuxCPUSetCPUs("0-27,32-59")
		updates = append(updates, update)
	}
	return updates
}

func (p *plugin) CreateContainer(_ context.Context, pod *api.PodSandbox, container *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	if !p.naming {
		return nil, nil, nil
	}
	for key := range pod.GetAnnotations() {
		if strings.HasSuffix(key, "/policy") {
			if container.GetLinux().GetResources().GetCpu().GetQuota().GetValue() >= exclusiveQuota {
				p.exclusive[container.GetId()] = true
				return nil, p.named(), nil
			}
			p.known[container.GetId()] = true
		}
	}
	return nil, nil, nil
}

func (p *plugin) StopContainer(_ context.Context, _ *api.PodSandbox, container *api.Container) ([]*api.ContainerUpdate, error) {
	delete(p.known, container.GetId())
	if !p.exclusive[container.GetId()] {
		return nil, nil
	}
	delete(p.exclusive, container.GetId())
	return p.named(), nil
}

func (*plugin) Synchronize(context.Context, []*api.PodSandbox, []*api.Container) ([]*api.ContainerUpdate, error) {
	return nil, nil
}

func (*plugin) UpdateContainer(context.Context, *api.PodSandbox, *api.Container, *api.LinuxResources) ([]*api.ContainerUpdate, error) {
	return nil, nil
}

func (*plugin) RunPodSandbox(context.Context, *api.PodSandbox) error    { return nil }
func (*plugin) StopPodSandbox(context.Context, *api.PodSandbox) error   { return nil }
func (*plugin) RemovePodSandbox(context.Context, *api.PodSandbox) error { return nil }
func (*plugin) StartContainer(context.Context, *api.PodSandbox, *api.Container) error {
	return nil
}
func (*plugin) PostStartContainer(context.Context, *api.PodSandbox, *api.Container) error {
	return nil
}
func (*plugin) PostUpdateContainer(context.Context, *api.PodSandbox, *api.Container) error {
	return nil
}
func (*plugin) RemoveContainer(context.Context, *api.PodSandbox, *api.Container) error {
	return nil
}

func main() {
	one := &plugin{
		naming: len(os.Args) > 2 && os.Args[2] == "naming",
		known:  map[string]bool{}, exclusive: map[string]bool{},
	}
	running, err := stub.New(one, stub.WithPluginName("empty"), stub.WithPluginIdx("10"), stub.WithSocketPath(os.Args[1]))
	if err == nil {
		err = running.Run(context.Background())
	}
	if err != nil {
		println(err.Error())
		os.Exit(1)
	}
}
