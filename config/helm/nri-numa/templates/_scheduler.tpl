{{- define "nri-numa.scheduler-labels" -}}
app.kubernetes.io/name: {{ include "nri-numa.fullname" . }}-scheduler
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: nri-numa
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* For the kube-scheduler in the pod, or for that of the control plane, whose operator copies it. */ -}}
{{- define "nri-numa.scheduler-config" -}}
{{- $section := .Values.config.scheduler | default dict -}}
{{- $address := $section.address | default "127.0.0.1:9894" | toString -}}
{{- $port := regexFind "[0-9]+$" $address -}}
{{- $stock := .Values.scheduler.kubeScheduler.enabled -}}
{{- $plugin := .Values.config.devicePlugin | default dict -}}
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
{{- if $stock }}
leaderElection:
  leaderElect: true
  resourceName: {{ .Values.scheduler.name }}
  resourceNamespace: {{ include "nri-numa.namespace" . }}
profiles:
  - schedulerName: {{ .Values.scheduler.name }}
{{- end }}
extenders:
  {{- if $stock }}
  - urlPrefix: http://127.0.0.1:{{ $port }}
  {{- else }}
  - urlPrefix: {{ ternary "https" "http" (not (empty $section.tlsCert)) }}://{{ include "nri-numa.fullname" . }}-scheduler.{{ include "nri-numa.namespace" . }}.svc:{{ $port }}
  {{- end }}
    filterVerb: filter
    {{- if eq (toString $section.filterToBest) "false" }}
    prioritizeVerb: prioritize
    weight: 5
    {{- end }}
    {{- if .Values.scheduler.preemption }}
    # Victims that free the NUMA nodes of a pod; without it they are chosen by the sums of Nodes.
    preemptVerb: preempt
    {{- end }}
    bindVerb: bind
    httpTimeout: 5s
    # Names instead of whole Nodes.
    nodeCacheCapable: true
    # true would bind pods without our annotation, silently, whenever bind fails.
    ignorable: false
    {{- if not $stock }}
    {{- if $section.tlsCert }}
    enableHTTPS: true
    # Files beside this one, where kube-scheduler runs.
    tlsConfig:
      certFile: /etc/kubernetes/nri-numa/client.crt
      keyFile: /etc/kubernetes/nri-numa/client.key
      caFile: /etc/kubernetes/nri-numa/ca.crt
      # Also where a replica that follows sends to the leader, by its pod's address.
      serverName: {{ include "nri-numa.fullname" . }}-scheduler.{{ include "nri-numa.namespace" . }}.svc
    {{- end }}
    # An extender belongs to all profiles: only pods with this resource are asked about.
    managedResources:
      - name: {{ $plugin.resourceName | default "numa.example.com/exclusive-cpu" }}
    {{- end }}
{{- end }}
