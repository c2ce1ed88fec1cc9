{{/* Name of the chart, in labels. */}}
{{- define "agentjobs.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{/* Beginning of the names of all objects. 50 characters leave room for a suffix. */}}
{{- define "agentjobs.fullname" -}}
{{- $name := include "agentjobs.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "agentjobs.operator" -}}
{{ include "agentjobs.fullname" . }}-operator
{{- end }}

{{- define "agentjobs.gateway" -}}
{{ include "agentjobs.fullname" . }}-gateway
{{- end }}

{{/* Labels of all objects. */}}
{{- define "agentjobs.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/name: {{ include "agentjobs.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: agentjobs
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Labels that select the operator's pods. They cannot change from one version to the next. */}}
{{- define "agentjobs.operatorSelector" -}}
app.kubernetes.io/name: {{ include "agentjobs.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "agentjobs.gatewaySelector" -}}
app.kubernetes.io/name: {{ include "agentjobs.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: gateway
{{- end }}

{{/* Where agents reach the gateway. */}}
{{- define "agentjobs.gatewayURL" -}}
{{- if .Values.gateway.url -}}
{{ .Values.gateway.url }}
{{- else -}}
{{ ternary "https" "http" (ne .Values.gateway.tls.secretName "") }}://{{ include "agentjobs.gateway" . }}.{{ .Release.Namespace }}.svc:8080
{{- end }}
{{- end }}

{{- define "agentjobs.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
{{- end }}

{{/* Whether output is kept on a volume: "true" or empty. */}}
{{- define "agentjobs.outputVolume" -}}
{{- if .Values.output.persistence.enabled -}}
{{- if .Values.output.url }}
{{- fail "output.url and output.persistence.enabled: output is kept in one place, so set one of them" }}
{{- end -}}
true
{{- end }}
{{- end }}

{{/* Whether that volume is for one node, and all pods with it: "true" or empty. */}}
{{- define "agentjobs.outputOnOneNode" -}}
{{- if and (include "agentjobs.outputVolume" .) (not (has "ReadWriteMany" .Values.output.persistence.accessModes)) -}}
{{- range $program, $replicas := dict "operator" .Values.operator.replicas "gateway" .Values.gateway.replicas }}
{{- if gt (int $replicas) 1 }}
{{- fail (printf "%s.replicas is %d, but the volume of output.persistence is for one node: set %s.replicas=1, or output.persistence.accessModes={ReadWriteMany}, or output.url instead of a volume" $program (int $replicas) $program) }}
{{- end }}
{{- end -}}
true
{{- end }}
{{- end }}

{{- define "agentjobs.outputClaim" -}}
{{ .Values.output.persistence.existingClaim | default (printf "%s-output" (include "agentjobs.fullname" .)) }}
{{- end }}

{{/* Environment by which both programs find the store of output, as items of a list. */}}
{{- define "agentjobs.outputEnv" -}}
{{- if or .Values.output.url .Values.output.persistence.enabled -}}
- name: AGENTJOBS_OUTPUT_STORE
  value: {{ ternary "file:///var/lib/agentjobs/output" .Values.output.url (eq (include "agentjobs.outputVolume" .) "true") | quote }}
{{- end }}
{{- end }}

{{/* Affinity of the pods of a program, as YAML: include "agentjobs.affinity" (list . .Values.operator.affinity). */}}
{{- define "agentjobs.affinity" -}}
{{- $root := index . 0 }}
{{- $affinity := deepCopy (index . 1) }}
{{- if include "agentjobs.outputOnOneNode" $root }}
{{- $labels := dict "app.kubernetes.io/name" (include "agentjobs.name" $root) "app.kubernetes.io/instance" $root.Release.Name }}
{{- $together := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" $labels) }}
{{- $pods := get $affinity "podAffinity" | default dict }}
{{- $required := get $pods "requiredDuringSchedulingIgnoredDuringExecution" | default list }}
{{- $_ := set $pods "requiredDuringSchedulingIgnoredDuringExecution" (append $required $together) }}
{{- $_ := set $affinity "podAffinity" $pods }}
{{- end }}
{{- with $affinity }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{/* User names of the two accounts, as CEL strings. */}}
{{- define "agentjobs.operatorUser" -}}
'system:serviceaccount:{{ .Release.Namespace }}:{{ include "agentjobs.operator" . }}'
{{- end }}

{{- define "agentjobs.gatewayUser" -}}
'system:serviceaccount:{{ .Release.Namespace }}:{{ include "agentjobs.gateway" . }}'
{{- end }}

{{/* Whether the policy that fills in defaults is rendered: "true" or empty. Discovery alone is no
guide, since `helm template` without a cluster claims every API that Helm knows. */}}
{{- define "agentjobs.defaultsPolicy" -}}
{{- if and (eq .Values.policies.defaults "auto")
      (semverCompare ">=1.36.0-0" .Capabilities.KubeVersion.Version)
      (.Capabilities.APIVersions.Has "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy") -}}
true
{{- end }}
{{- end }}

{{/* Binding that puts a policy of the same name in force: include "agentjobs.binding" (list . "name"). */}}
{{- define "agentjobs.binding" -}}
{{- $root := index . 0 }}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ include "agentjobs.fullname" $root }}-{{ index . 1 }}
  labels:
    {{- include "agentjobs.labels" $root | nindent 4 }}
spec:
  policyName: {{ include "agentjobs.fullname" $root }}-{{ index . 1 }}
  validationActions: [Deny]
{{- end }}
